"""What a sample is: splits, Megatron's GPT sample order, documents as samples, blends."""
