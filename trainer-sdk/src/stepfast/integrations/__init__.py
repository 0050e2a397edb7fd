"""Training frameworks that save and load through Stepfast. Each module needs its framework; none is a dependency."""
