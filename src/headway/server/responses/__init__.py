"""The Responses dialect: items in, items and events out, stored unless `store` is false."""
