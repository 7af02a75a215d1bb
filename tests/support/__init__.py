"""Private RabbitMQ and Postgres servers for tests, demo and benchmarks: free ports, temporary directories, no trace."""
