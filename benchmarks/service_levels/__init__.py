"""SLOs met in real time: clients of three classes, a real router, simulated workers."""
