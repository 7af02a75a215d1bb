"""Private RabbitMQ and Postgres servers for tests, the demo and benchmarks: free ports, temporary directories, no trace."""
