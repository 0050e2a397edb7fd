"""Where gangs run: one backend a module, all behind `base.Backend`."""
