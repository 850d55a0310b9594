"""The routes of the application beside the proxy: health, workers, models, explain, metrics."""
