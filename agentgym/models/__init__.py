"""What a model is: its forward, its tokens and conversations, its checkpoint."""
