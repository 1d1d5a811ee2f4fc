"""What every service stands on: start and drain, health, interceptors, item streams, the store."""
