"""An engine's journal: `rotating` writes it, `restore` reads it, `resume` has clients' claims, `origin` the model."""
