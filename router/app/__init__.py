"""The application: services in their order of start, and the routes beside the proxy."""
