"""Uploaded files: the folder they lie in, their records, and `/v1/files`."""
