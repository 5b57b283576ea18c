terraform {
  required_version = ">= 1.10" # the S3 backend's own lock file
  required_providers {
    # Tested with 5.100; written for 6 by its upgrade guide, and not tried with it.
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = local.tags
  }

  # The rest is for tests, against an AWS that answers on this machine.
  access_key                  = var.aws_endpoint == null ? null : "test"
  secret_key                  = var.aws_endpoint == null ? null : "test"
  max_retries                 = var.aws_endpoint == null ? null : 1 # a call that is missing there costs 8 minutes otherwise
  s3_use_path_style           = var.aws_endpoint != null
  skip_credentials_validation = var.aws_endpoint != null
  skip_metadata_api_check     = var.aws_endpoint != null
  skip_region_validation      = var.aws_endpoint != null

  dynamic "endpoints" {
    for_each = var.aws_endpoint == null ? [] : [var.aws_endpoint]
    content {
      autoscaling = endpoints.value
      budgets     = endpoints.value
      cloudwatch  = endpoints.value
      ec2         = endpoints.value
      ecr         = endpoints.value
      eks         = endpoints.value
      fsx         = endpoints.value
      iam         = endpoints.value
      kms         = endpoints.value
      logs        = endpoints.value
      s3          = endpoints.value
      sns         = endpoints.value
      sts         = endpoints.value
    }
  }
}
