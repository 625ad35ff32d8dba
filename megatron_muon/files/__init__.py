"""A checkpoint's files as data: reading, writing, locking and hashing them without Megatron."""
