"""The configuration: flags override the environment, which overrides the TOML file. Errors are reported together."""
