"""From prompts to token ids: tokenizers, chat templates, and their caches."""
