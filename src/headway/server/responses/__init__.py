"""The Responses dialect: a request for one answer, told as items and events, kept if wanted."""
