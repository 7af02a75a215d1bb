"""Messages and schedules as people and programs write and read them: the fields that they give, and the JSON that they
get. On the command line and over HTTP they are the same."""
