"""From prompts to token ids: the tokenizers, chat templates, and what is kept of both."""
