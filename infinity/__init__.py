"""infinity: fine-tune models far larger than the memory of the machine."""
