"""What a chunk weighs and how its bytes lie: layouts of shards."""
