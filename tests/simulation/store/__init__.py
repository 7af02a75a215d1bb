"""The simulated store: a real Postgres whose clock, connections and life belong to the simulation."""
