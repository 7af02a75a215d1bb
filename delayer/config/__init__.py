"""The configuration: flags win over the environment, the environment over the TOML file. All mistakes come at once."""
