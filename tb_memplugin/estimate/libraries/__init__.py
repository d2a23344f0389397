"""Other libraries: cuDNN, Inductor, and plugins for what training libraries do."""
