"""The choice of a worker for requests that another program sends, and their load until that program releases it."""
