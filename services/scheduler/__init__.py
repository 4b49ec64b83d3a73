"""scheduler: decides what runs, owns every KV page id, and keeps the record of each request."""
