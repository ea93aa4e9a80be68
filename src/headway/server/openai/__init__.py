"""The OpenAI dialect: request bodies, answers, chunks."""
