"""How numbers are kept: formats, the op policy, arithmetic, storage and loss scaling."""
