"""The examinations of `kvcellar doctor`: each says what it found and what to type."""
