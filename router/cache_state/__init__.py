"""What ranks hold beside what events say: prompts in flight, what was sent there, and whether that is right."""
