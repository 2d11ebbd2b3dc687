"""Super Mario Bros. as a Gymnasium env: emulator cores, memory map, env, reward shaping, metrics, videos."""
