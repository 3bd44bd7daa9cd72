"""Ways into the engine: attach, the drop-in class, the communication hook of DDP, averages of parameters."""
