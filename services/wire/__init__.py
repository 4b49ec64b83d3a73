"""The contract between the processes: messages, encoding, endpoints, sockets. Imports stdlib, msgpack, pyzmq only."""
