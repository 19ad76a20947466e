"""Maps of a model's attention with the full cache: the measurements behind figures of CORM and WeightedKV."""
