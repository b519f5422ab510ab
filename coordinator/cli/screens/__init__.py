"""What a person sees before the text, and what asks for settings."""
