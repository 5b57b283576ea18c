# stacks/eks/versions.tf and stacks/batch/versions.tf are symbolic links to this file, and their .terraform.lock.hcl to the
# lock beside it.

terraform {
  required_version = ">= 1.10" # the first whose S3 backend locks without DynamoDB
  required_providers {
    # The major version that the tests run. 6 changes names of arguments, and nobody has tried it.
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = local.tags
  }

  # Everything below serves tests, in which a simulated AWS answers on this machine.
  access_key                  = var.aws_endpoint == null ? null : "test"
  secret_key                  = var.aws_endpoint == null ? null : "test"
  max_retries                 = var.aws_endpoint == null ? null : 1 # the default would retry a missing call for 8 minutes
  s3_use_path_style           = var.aws_endpoint != null
  skip_credentials_validation = var.aws_endpoint != null
  skip_metadata_api_check     = var.aws_endpoint != null
  skip_region_validation      = var.aws_endpoint != null

  dynamic "endpoints" {
    for_each = var.aws_endpoint == null ? [] : [var.aws_endpoint]
    content {
      autoscaling = endpoints.value
      batch       = endpoints.value
      budgets     = endpoints.value
      cloudwatch  = endpoints.value
      ec2         = endpoints.value
      ecr         = endpoints.value
      eks         = endpoints.value
      events      = endpoints.value
      fsx         = endpoints.value
      iam         = endpoints.value
      kms         = endpoints.value
      logs        = endpoints.value
      s3          = endpoints.value
      scheduler   = endpoints.value
      sns         = endpoints.value
      sts         = endpoints.value
    }
  }
}
