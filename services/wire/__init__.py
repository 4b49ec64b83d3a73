"""The contract between the processes: messages, their encoding, endpoints and sockets. Imports stdlib, msgpack, pyzmq only."""
