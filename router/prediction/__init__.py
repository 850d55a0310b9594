"""What is learned of the workers and their answers: rates, output lengths, the price of an eviction."""
