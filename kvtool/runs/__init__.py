"""From options to what runs: a model and an engine, and what there is to say of them."""
