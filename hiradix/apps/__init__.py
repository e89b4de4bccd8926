"""Programs on the library: the reference engine, its server, the replay lab, the demo, the benchmark."""
