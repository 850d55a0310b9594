"""Mid-stream failover: a stream whose worker fails is continued on another worker."""
