"""Pure decisions about activations: what is kept, stored or computed again. No torch."""
