"""HTTP: the OpenAI dialect over engine clients, with its errors, limits and streams."""
