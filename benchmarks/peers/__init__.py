"""What a user would write otherwise: each peer computes what the library's op does, or a stated limit of it."""
