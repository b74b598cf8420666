"""What a laptop needs: Apache Kafka from Maven, a small engine, and the whole pipeline started on one machine."""
