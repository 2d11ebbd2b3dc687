"""Super Mario Bros. as an environment: emulator cores, the game's memory, the environment, videos."""
