"""Side-by-side measurements, one command each; ratios in one run, since wall time is noisy."""
