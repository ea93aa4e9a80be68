"""The Anthropic dialect: messages of blocks in, a message of blocks out."""
