"""HTTP in front of an `AsyncLLM`: the routes of OpenAI's API, metrics, and who may ask."""
