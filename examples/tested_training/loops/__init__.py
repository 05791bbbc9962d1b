"""Two training loops, by Accelerate and by Lightning's Fabric; neither knows of syncprims."""
