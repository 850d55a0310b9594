"""What a report costs the engine's thread, beside what packing the same tokens and names alone costs."""
