"""Operations on checkpoints without a training job."""
