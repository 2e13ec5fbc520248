"""The target model: weights, forward, KV pool."""
