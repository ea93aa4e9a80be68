"""What limits a server, what would help and what would be a waste."""
