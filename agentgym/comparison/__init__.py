"""Many runs side by side: which they are, what came out, and how it is told."""
