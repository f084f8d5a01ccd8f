"""What a run would need and take, before it runs: recorded without values, and played on a clock."""
